"""Heads in closed form: the sums that clients send, ridge regression from them, their privacy, and false sums."""
