"""The API for programs: bearer keys, OpenAI's shapes, chats kept on the server or found again."""
