"""The files of a calibration and their readers."""
