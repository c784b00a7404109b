"""The rollout buffer, its advantages and minibatches."""
