"""The Flower app that trains a scenario on a real fleet."""
