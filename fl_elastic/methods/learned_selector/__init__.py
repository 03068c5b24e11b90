"""Scores predicted from one forward pass by a small pretrained network."""

importances = {"learned": "importance"}
channel_scores = {"learned": "importance"}
