"""`python -m slime.doctor`: can a run start on this machine, and what is missing for it?"""
