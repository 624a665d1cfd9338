"""In a group: workers sum what they have among themselves, and each makes the update itself."""
