"""HTTP server with the completions API of OpenAI: requests, the thread of the device, routes."""
