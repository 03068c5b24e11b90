"""Codecs for the numbers of a partial update: one file each, listed by name in `fl_elastic.update.codecs.base`."""
