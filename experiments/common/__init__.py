"""What commands share: settings, rows and tables, workers, trackers."""
