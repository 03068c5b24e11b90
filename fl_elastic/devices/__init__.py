"""What a device reports about itself: processors, memory, power and heat."""
