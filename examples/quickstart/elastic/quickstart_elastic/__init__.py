"""Handwritten digits, learned together by four nodes of unequal speed."""
