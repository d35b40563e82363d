"""What a rank trains with: tasks of PyTorch, scripts, synthetic programs; their gradients, parameters and state."""
