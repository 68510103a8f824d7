"""Tables, figures and pages of records and rounds."""
