"""Drafters: guess tokens that the model then verifies. base.py is their interface."""
