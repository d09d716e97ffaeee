"""Report of a calibration: charts as PNG files and one self-contained HTML page."""
