"""The episodic buffer: whole episodes in one ring, and what can be drawn from them."""
