"""Speech recognition: audio files and their spectrograms."""
