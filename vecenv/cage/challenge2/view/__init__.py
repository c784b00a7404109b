"""What people look at: one environment in words, tables, pictures."""
