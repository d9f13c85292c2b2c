"""Learned planners: the policy, the DQN over edits of complete plans, the paper's DQN, and structure2vec."""
