"""Vector envs in the actors of a Ray cluster; Ray itself is imported when one is made."""
