"""HTTP server with OpenAI's APIs for texts and audio: requests, thread of the device, routes."""
