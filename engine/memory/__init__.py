"""Pages, K/V tensors, prefix nodes and resident chats. Knows nothing of the model."""
