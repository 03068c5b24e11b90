"""Handwritten digits, learned together by four nodes."""
