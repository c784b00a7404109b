"""The episodic buffer: whole episodes in one ring, and draws from them."""
