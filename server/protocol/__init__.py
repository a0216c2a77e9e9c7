"""What every route says alike: errors and documents."""
