# A cluster to train on: a few small machines for the system, GPU machines near each other with EFA, and a file system
# that all pods share. Shoal needs nothing else; its chart goes into a namespace (docs/guide/kubernetes.md).

locals {
  tags       = { Project = var.name, ManagedBy = "terraform" }
  gpu_subnet = var.gpu_subnet_id != "" ? var.gpu_subnet_id : var.subnet_ids[0]
  node_policies = [
    "AmazonEKSWorkerNodePolicy",
    "AmazonEKS_CNI_Policy",
    "AmazonEC2ContainerRegistryPullOnly",
  ]
}

data "aws_partition" "current" {}

# The cluster.

resource "aws_iam_role" "cluster" {
  name = "${var.name}-cluster"
  tags = local.tags
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "eks.amazonaws.com" }
    }]
  })
}

resource "aws_iam_role_policy_attachment" "cluster" {
  role       = aws_iam_role.cluster.name
  policy_arn = "arn:${data.aws_partition.current.partition}:iam::aws:policy/AmazonEKSClusterPolicy"
}

resource "aws_eks_cluster" "this" {
  name     = var.name
  version  = var.kubernetes_version
  role_arn = aws_iam_role.cluster.arn
  tags     = local.tags

  access_config {
    authentication_mode                         = "API"
    bootstrap_cluster_creator_admin_permissions = true
  }

  vpc_config {
    subnet_ids              = var.subnet_ids
    endpoint_private_access = true
    endpoint_public_access  = length(var.admin_cidrs) > 0
    public_access_cidrs     = length(var.admin_cidrs) > 0 ? var.admin_cidrs : null
  }

  depends_on = [aws_iam_role_policy_attachment.cluster]
}

resource "aws_eks_addon" "network" {
  cluster_name = aws_eks_cluster.this.name
  addon_name   = "vpc-cni"
  # Without this a NetworkPolicy is accepted and does nothing.
  configuration_values = jsonencode({ enableNetworkPolicy = "true" })
}

resource "aws_eks_addon" "plain" {
  for_each     = toset(["kube-proxy", "coredns", "eks-pod-identity-agent"])
  cluster_name = aws_eks_cluster.this.name
  addon_name   = each.key
  depends_on   = [aws_eks_node_group.system]
}

# The machines.

resource "aws_iam_role" "node" {
  name = "${var.name}-node"
  tags = local.tags
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "ec2.amazonaws.com" }
    }]
  })
}

resource "aws_iam_role_policy_attachment" "node" {
  for_each   = toset(local.node_policies)
  role       = aws_iam_role.node.name
  policy_arn = "arn:${data.aws_partition.current.partition}:iam::aws:policy/${each.key}"
}

resource "aws_eks_node_group" "system" {
  cluster_name    = aws_eks_cluster.this.name
  node_group_name = "system"
  node_role_arn   = aws_iam_role.node.arn
  subnet_ids      = var.subnet_ids
  instance_types  = ["m7i.large"]
  ami_type        = "AL2023_x86_64_STANDARD"
  tags            = local.tags

  scaling_config {
    min_size     = 2
    max_size     = 4
    desired_size = 2
  }

  depends_on = [aws_iam_role_policy_attachment.node, aws_eks_addon.network]
}

resource "aws_security_group" "gpu" {
  name        = "${var.name}-gpu"
  description = "GPU machines among themselves: EFA wants everything between them, both ways."
  vpc_id      = var.vpc_id
  tags        = local.tags
}

resource "aws_vpc_security_group_ingress_rule" "gpu" {
  security_group_id            = aws_security_group.gpu.id
  referenced_security_group_id = aws_security_group.gpu.id
  ip_protocol                  = "-1"
}

resource "aws_vpc_security_group_egress_rule" "gpu" {
  security_group_id            = aws_security_group.gpu.id
  referenced_security_group_id = aws_security_group.gpu.id
  ip_protocol                  = "-1"
}

resource "aws_vpc_security_group_egress_rule" "gpu_out" {
  security_group_id = aws_security_group.gpu.id
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "-1"
}

resource "aws_placement_group" "gpu" {
  name     = "${var.name}-gpu"
  strategy = "cluster"
  tags     = local.tags
}

resource "aws_launch_template" "gpu" {
  name_prefix = "${var.name}-gpu-"
  tags        = local.tags

  placement {
    group_name = aws_placement_group.gpu.name
  }

  metadata_options {
    http_tokens                 = "required"
    http_put_response_hop_limit = 1 # pods cannot take the machine's rights
  }

  block_device_mappings {
    device_name = "/dev/xvda"
    ebs {
      volume_size = var.disk_gb
      volume_type = "gp3"
      encrypted   = true
    }
  }

  vpc_security_group_ids = var.efa_interfaces == 0 ? local.gpu_groups : null

  dynamic "network_interfaces" {
    for_each = range(var.efa_interfaces)
    content {
      network_card_index          = network_interfaces.value
      device_index                = network_interfaces.value == 0 ? 0 : 1
      interface_type              = network_interfaces.value == 0 ? "efa" : "efa-only"
      associate_public_ip_address = network_interfaces.value == 0 ? false : null
      delete_on_termination       = true
      security_groups             = local.gpu_groups
    }
  }

  dynamic "instance_market_options" {
    for_each = var.capacity_type == "CAPACITY_BLOCK" ? [1] : []
    content {
      market_type = "capacity-block"
    }
  }

  dynamic "capacity_reservation_specification" {
    for_each = var.capacity_reservation_id == "" ? [] : [1]
    content {
      capacity_reservation_target {
        capacity_reservation_id = var.capacity_reservation_id
      }
    }
  }
}

locals {
  gpu_groups = [aws_security_group.gpu.id, aws_eks_cluster.this.vpc_config[0].cluster_security_group_id]
}

resource "aws_eks_node_group" "gpu" {
  cluster_name    = aws_eks_cluster.this.name
  node_group_name = "gpu"
  node_role_arn   = aws_iam_role.node.arn
  subnet_ids      = [local.gpu_subnet]
  instance_types  = [var.gpu_instance_type]
  ami_type        = "AL2023_x86_64_NVIDIA"
  capacity_type   = var.capacity_type
  tags            = local.tags

  launch_template {
    id      = aws_launch_template.gpu.id
    version = aws_launch_template.gpu.latest_version
  }

  scaling_config {
    min_size     = var.gpu_nodes.min
    max_size     = var.gpu_nodes.max
    desired_size = var.gpu_nodes.desired
  }

  # Nobody without a GPU to use comes here; Shoal's pods tolerate it by themselves.
  taint {
    key    = "nvidia.com/gpu"
    value  = "present"
    effect = "NO_SCHEDULE"
  }

  lifecycle {
    ignore_changes = [scaling_config[0].desired_size] # an autoscaler's
  }

  depends_on = [aws_iam_role_policy_attachment.node, aws_eks_addon.network]
}
