"""What a device tells of itself: processors, memory, power, heat and energy."""
