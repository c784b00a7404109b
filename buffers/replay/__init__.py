"""The replay buffers: transitions in packed rows, and three ways to draw them."""
