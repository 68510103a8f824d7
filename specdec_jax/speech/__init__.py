<<<<<<< HEAD
"""Speech recognition: audio files and their spectrograms."""
=======
"""Transcription of speech with Whisper."""
>>>>>>> helper_stamps
