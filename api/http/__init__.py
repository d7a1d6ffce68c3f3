"""The HTTP gateway: a Ray Serve application that speaks the Tinker API, a plain one, and that of OpenAI."""
