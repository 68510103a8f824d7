"""Transcription of speech with Whisper."""
