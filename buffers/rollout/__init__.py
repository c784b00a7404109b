"""The rollout buffer, and what follows from its steps: advantages and minibatches."""
