"""Handwritten digits, learned together by three real nodes of unequal speed."""
