"""The terminal chat: a client of the HTTP server, which it starts when none is running. Never imports torch."""
