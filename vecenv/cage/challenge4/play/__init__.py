"""Blue policies of the reference returns."""
