"""A person's chats as a whole: search, the way out, the way in, deletion with a way back."""
