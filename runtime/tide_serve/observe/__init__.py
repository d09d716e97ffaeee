"""What is noted of each request: record, metrics, logs, traces."""
