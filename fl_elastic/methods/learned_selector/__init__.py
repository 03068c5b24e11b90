"""Scores predicted from one forward pass by a small network that was trained beforehand."""

importances = {"learned": "importance"}
channel_scores = {"learned": "importance"}
