"""The statements behind the repository: each function runs inside the caller's transaction."""
