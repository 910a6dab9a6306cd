{{/* Names and labels of objects. */}}

{{/* Prefix of all names, unique within the release's namespace. A shortened prefix ends with a digest of the full one. */}}
{{- define "batchllm.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := .Values.fullnameOverride -}}
{{- if not $full -}}
{{- $full = ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- end -}}
{{- if gt (len $full) 40 -}}
{{- $full = printf "%s-%s" (regexReplaceAll "[-.]+$" (trunc 31 $full) "") (sha256sum $full | trunc 8) -}}
{{- end -}}
{{- $full -}}
{{- end -}}

{{/*
Name of an object outside the release's namespace; arguments: root, suffix. It ends with a dot and the release's namespace.
Namespaces contain no dot, so no two releases make the same name.
*/}}
{{- define "batchllm.outsideName" -}}
{{- printf "%s-%s.%s" (include "batchllm.fullname" .root) .suffix .root.Release.Namespace -}}
{{- end -}}

{{- define "batchllm.podTemplatesName" -}}
{{- include "batchllm.outsideName" (dict "root" . "suffix" "pod-templates") -}}
{{- end -}}

{{/*
Fails if Airflow's namespace is absent: half of the objects would be made before that shows. Every namespace has a ConfigMap
(kube-root-ca.crt). Without a cluster, as in `helm template`, lookup returns an empty map.
*/}}
{{- define "batchllm.checkAirflowNamespace" -}}
{{- $namespace := .Values.airflow.namespace -}}
{{- if ne $namespace .Release.Namespace -}}
{{- $configMaps := lookup "v1" "ConfigMap" $namespace "" -}}
{{- if and $configMaps (not $configMaps.items) -}}
{{- fail (printf "airflow.namespace: there is no namespace %s; name the one that Airflow runs in, or make it first: kubectl create namespace %s" $namespace $namespace) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "batchllm.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
app.kubernetes.io/name: batchllm
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
{{- end -}}

{{/* Account of pods; arguments: root, kind (gpu, cpu or spark). */}}
{{- define "batchllm.serviceAccountName" -}}
{{- $account := (index .root.Values .kind).serviceAccount -}}
{{- if $account.name -}}
{{- $account.name -}}
{{- else if $account.create -}}
{{- printf "%s-%s" (include "batchllm.fullname" .root) .kind -}}
{{- else -}}
{{- fail (printf "%s.serviceAccount: give the name of an account, or create: true" .kind) -}}
{{- end -}}
{{- end -}}

{{- define "batchllm.priorityClassName" -}}
{{- if .Values.priorityClass.name -}}
{{- .Values.priorityClass.name -}}
{{- else if .Values.priorityClass.create -}}
{{- include "batchllm.outsideName" (dict "root" . "suffix" "batch") -}}
{{- end -}}
{{- end -}}

{{- define "batchllm.modelClaimName" -}}
{{- default (printf "%s-models" (include "batchllm.fullname" .)) .Values.modelCache.existingClaim -}}
{{- end -}}
