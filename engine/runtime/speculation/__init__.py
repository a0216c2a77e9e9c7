"""Drafters: guess tokens that the model then verifies. drafter.py is their interface."""
