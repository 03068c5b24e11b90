"""Handwritten digits, learned together by ten unequal devices."""
