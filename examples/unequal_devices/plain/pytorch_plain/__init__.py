"""Handwritten digits, learned together by ten nodes."""
