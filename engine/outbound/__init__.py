"""What leaves the engine about K/V: events, stores, parcels."""
