"""Helpers for every floor. Nothing here knows of a device."""
