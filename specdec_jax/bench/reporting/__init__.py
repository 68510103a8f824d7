"""Tables, figures and pages of the measurements in `bench`."""
