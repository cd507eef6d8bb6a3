# One small server with the shipped unit files; sites reach port 8443, operators port 22 from their own network.
terraform {
  required_version = ">= 1.5"
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.0, < 7.0"
    }
  }
}

variable "ami" {
  description = "Image of the machine: a Debian 12 or newer"
  type        = string
}

variable "subnet_id" {
  description = "Subnet in which the server stands"
  type        = string
}

variable "vpc_id" {
  description = "Network of the subnet"
  type        = string
}

variable "site_cidrs" {
  description = "Addresses from which sites dial"
  type        = list(string)
}

variable "operator_cidrs" {
  description = "Addresses from which operators log in; Control is reached through SSH alone"
  type        = list(string)
  validation {
    condition     = !contains(var.operator_cidrs, "0.0.0.0/0")
    error_message = "SSH from everywhere is not allowed: name the operators' network."
  }
}

variable "instance_type" {
  description = "Two cores and 8 GB carry adapters of models up to a few billion parameters"
  type        = string
  default     = "m7i.large"
}

resource "aws_security_group" "server" {
  name_prefix = "umbel-server-"
  description = "Fleet API for sites, SSH for operators"
  vpc_id      = var.vpc_id
}

resource "aws_vpc_security_group_ingress_rule" "fleet" {
  for_each          = toset(var.site_cidrs)
  security_group_id = aws_security_group.server.id
  description       = "Fleet API"
  ip_protocol       = "tcp"
  from_port         = 8443
  to_port           = 8443
  cidr_ipv4         = each.value
}

resource "aws_vpc_security_group_ingress_rule" "ssh" {
  for_each          = toset(var.operator_cidrs)
  security_group_id = aws_security_group.server.id
  description       = "operators"
  ip_protocol       = "tcp"
  from_port         = 22
  to_port           = 22
  cidr_ipv4         = each.value
}

resource "aws_instance" "server" {
  ami                    = var.ami
  instance_type          = var.instance_type
  subnet_id              = var.subnet_id
  vpc_security_group_ids = [aws_security_group.server.id]
  user_data              = file("${path.module}/server.sh")

  metadata_options {
    http_tokens = "required"
  }

  root_block_device {
    volume_size = 60
    encrypted   = true
  }

  tags = { Name = "umbel-server" }
}

output "address" {
  description = "What sites dial, on port 8443; the certificate has to name it"
  value       = aws_instance.server.public_ip
}
