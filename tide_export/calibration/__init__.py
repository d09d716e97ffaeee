"""What a calibration leaves behind: its files, and how the exporter reads them."""
