"""Ways in which the steps of a plan differ from plain ones, a value each."""
