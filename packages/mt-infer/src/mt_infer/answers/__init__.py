"""The bodies of a server's answers: completions, chats and responses, whole or in parts."""
