"""What a calibration found, drawn: charts as PNG files and one self-contained HTML page."""
