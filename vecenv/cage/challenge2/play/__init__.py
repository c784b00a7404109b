"""Blue policies, and letting them play."""
