"""What a device reports about itself: processors, memory, power, heat and energy."""
