"""The network of an episode: its state record, and how it is drawn."""
