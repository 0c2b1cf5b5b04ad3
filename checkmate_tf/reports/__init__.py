"""What users read: reports, tradeoff curves, and their pages."""
